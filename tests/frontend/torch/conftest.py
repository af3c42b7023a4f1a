"""Random numbers of torch are the same in every run of a test."""

from tests.torch.conftest import seed  # noqa: F401  (a fixture)
