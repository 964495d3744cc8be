"""Started in place of SGLang's launcher: answers /model_info, and has two children as SGLang has.

`--fake=` in its arguments says how it fails: `die` with a traceback, `hang` without an answer, or
`die-again`, which answers the first time and dies whenever it is started again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        known = self.path == "/model_info"
        body = json.dumps({"arguments": sys.argv[1:], "environment": dict(os.environ)}).encode()
        self.send_response(200 if known else 404)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--port", type=int)
    parser.add_argument("--nccl-port", type=int)
    parser.add_argument("--fake", default="")
    parser.add_argument("--state", type=Path)
    options, _ = parser.parse_known_args()
    fake = options.fake
    if fake == "die-again":
        fake = "die" if options.state.exists() else ""
        options.state.touch()
    print("loading …", flush=True)
    for new_session in (False, True):
        subprocess.Popen(["sleep", "1000"], start_new_session=new_session)
    if fake == "die":
        raise MemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    if fake == "hang":
        time.sleep(1000)
    nccl = ThreadingHTTPServer(("", options.nccl_port), Handler)
    server = ThreadingHTTPServer(("127.0.0.1", options.port), Handler)
    with nccl, server:
        server.serve_forever()


if __name__ == "__main__":
    main()
