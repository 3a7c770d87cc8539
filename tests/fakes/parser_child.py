"""A parser without vLLM for `weightcached preload`: --some-key VALUE becomes some_key, as JSON."""

from __future__ import annotations

import json
import sys


def main() -> None:
    """Print the arguments as one JSON object; the value "refused" is an error."""
    words = iter(sys.argv[1:])
    given = {}
    for word in words:
        text = next(words)
        if text == "refused":
            sys.stderr.write(f"parser: error: argument {word}: invalid value\n")
            sys.exit(2)
        try:
            given[word.removeprefix("--").replace("-", "_")] = json.loads(text)
        except json.JSONDecodeError:
            given[word.removeprefix("--").replace("-", "_")] = text
    print(json.dumps(given))


if __name__ == "__main__":
    main()
