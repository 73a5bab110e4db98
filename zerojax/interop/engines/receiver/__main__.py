"""Keeps a Hugging Face folder at a training job's weights, and tells an engine about each version."""

import argparse
import os
import sys
import threading
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from .ends import TOKEN, Feed, Receiver
from .mirror import Mirror, Update


class Post:
    """Tells an engine about each version by an HTTP request.

    Args:
        url: of the request. vLLM's server has /collective_rpc if VLLM_SERVER_DEV_MODE=1.
        body: JSON, in which {folder} and {version} are replaced.
        seconds: for the response.
    """

    RELOAD = '{"method": "reload_weights", "kwargs": {"weights_path": "{folder}"}}'

    def __init__(self, url: str, body: str = RELOAD, seconds: float = 600.0) -> None:
        self._url, self._body, self._seconds = url, body, seconds

    def __call__(self, update: Update) -> None:
        """Send the request; an engine that does not respond reads the folder when it starts."""
        body = self._body.replace("{folder}", str(update.folder.absolute()))
        body = body.replace("{version}", str(update.version))
        request = urllib.request.Request(self._url, body.encode(), {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=self._seconds) as response:
                response.read()
        except OSError as error:
            print(
                f"{self._url} has not loaded version {update.version}: {error}", file=sys.stderr, flush=True
            )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a receiver until it is stopped."""
    parser = argparse.ArgumentParser(description="Keep a Hugging Face folder at a training job's weights.")
    parser.add_argument("--listen", required=True, metavar="HOST:PORT")
    parser.add_argument("--mirror", required=True, type=Path, help="folder; MIRROR/current is the model")
    parser.add_argument("--post", metavar="URL", help="request after each version, for vLLM's reload_weights")
    parser.add_argument("--body", default=Post.RELOAD, help="its JSON, with {folder} and {version}")
    parser.add_argument("--relay", nargs="*", default=[], metavar="HOST:PORT", help="receivers to forward to")
    parser.add_argument("--flows", type=int, default=4, help="connections to each of these")
    options = parser.parse_args(arguments)
    token = os.environ.get(TOKEN, "").strip()
    callbacks = [Post(options.post, options.body)] if options.post else []
    mirror = Mirror(options.mirror, [*callbacks, _print])
    try:
        feeds = [Feed(mirror, address, token, options.flows) for address in options.relay]
        receiver = Receiver(mirror, options.listen, token)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(f"listening at {receiver.address}, {len(feeds)} receivers behind", flush=True)
    threading.Event().wait()


def _print(update: Update) -> None:
    print(f"version {update.version}: {update.folder}", flush=True)


if __name__ == "__main__":
    main()
