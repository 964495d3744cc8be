"""The image of a Docker sandbox: by its name, from a Dockerfile, or from a root file system."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from tools.sandbox.protocol import SandboxUnavailable

REPOSITORY = "agentrl-sandbox"
ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".tar.bz2")


def find_image(client: Any, image: str, *, pull: bool) -> Any:
    """The engine's image that `image` means: found, pulled, built or imported.

    A Dockerfile is built with the engine's cache; a root file system is imported once, and known by
    the hash of its bytes.

    Raises:
        SandboxUnavailable: there is none; says what to do.
        docker.errors.DockerException, requests.RequestException: of the engine.
    """
    path = Path(image).expanduser()
    if image.endswith(ARCHIVES):
        return imported(client, path)
    if path.is_file() or (path / "Dockerfile").is_file():
        return built(client, path)
    if image.startswith((".", "/", "~")):
        raise SandboxUnavailable(f"sandbox.image: {path} is no Dockerfile, nor has one in it")
    return named(client, image, pull=pull)


def named(client: Any, name: str, *, pull: bool) -> Any:
    from docker.errors import APIError, ImageNotFound

    try:
        return client.images.get(name)
    except ImageNotFound:
        if not pull:
            raise SandboxUnavailable(
                f"the engine has no image {name}: docker pull {name}, or set sandbox.level to "
                "docker, which pulls it, or sandbox.image to one that is there"
            ) from None
    try:
        return client.images.pull(name)
    except APIError as error:
        raise SandboxUnavailable(
            f"image {name} is not here and cannot be pulled ({error.explanation}); set "
            "sandbox.image to one that is here, a Dockerfile, or the tar of a root file system"
        ) from error


def built(client: Any, path: Path) -> Any:
    from docker.errors import BuildError

    folder, dockerfile = (path.parent, path.name) if path.is_file() else (path, "Dockerfile")
    try:
        image, _ = client.images.build(path=str(folder), dockerfile=dockerfile, forcerm=True)
    except BuildError as error:
        last = "".join(line.get("stream", "") for line in error.build_log)[-500:].strip()
        raise SandboxUnavailable(
            f"{folder / dockerfile} cannot be built: {error.msg}. {last}"
        ) from error
    # Without a name it would be taken for a left-over.
    image.tag(REPOSITORY, tag=image.id.removeprefix("sha256:")[:12])
    return image


def imported(client: Any, path: Path) -> Any:
    from docker.errors import ImageNotFound

    if not path.is_file():
        raise SandboxUnavailable(f"sandbox.image: there is no file {path}")
    with path.open("rb") as file:
        tag = hashlib.file_digest(file, "sha256").hexdigest()[:12]
    try:
        return client.images.get(f"{REPOSITORY}:{tag}")
    except ImageNotFound:
        client.api.import_image_from_file(str(path), repository=REPOSITORY, tag=tag)
        return client.images.get(f"{REPOSITORY}:{tag}")
