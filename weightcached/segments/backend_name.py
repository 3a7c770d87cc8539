"""The names of the back ends, as an index records them."""

from typing import Literal

BackendName = Literal["host", "cuda"]
