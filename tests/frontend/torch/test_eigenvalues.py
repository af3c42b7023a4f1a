"""Eigenvalues, singular values and what follows from them, of PyTorch programs. Vectors have no sign of their own."""

from __future__ import annotations

from typing import Any

import pytest

import relaxlite as rl

torch = pytest.importorskip("torch")
AUTO = torch.export.Dim.AUTO
linalg = torch.linalg


class Factors(torch.nn.Module):
    def forward(self, x: Any, singular: Any) -> Any:
        symmetric = x + x.mT
        values, vectors = linalg.eigh(symmetric, UPLO="U")
        u, s, vh = linalg.svd(singular)
        return {
            "eigenvalues": values,
            "matrix of eigenvectors": vectors @ torch.diag_embed(values) @ vectors.mT,
            "absolute vectors": vectors.abs(),
            "singular values": s,
            "left vectors": u @ u.mT,
            "right vectors": vh @ vh.mT,
            "matrix of singular vectors": (u[:, :, : s.shape[-1]] * s.unsqueeze(-2)) @ vh[:, : s.shape[-1]],
            "values alone": linalg.svdvals(singular.mT),
            "pseudoinverse": linalg.pinv(singular),
            "symmetric pseudoinverse": linalg.pinv(symmetric, atol=0.5, hermitian=True),
            "condition": linalg.cond(x),
        }


def matrices(batch: int, rows: int, columns: int) -> tuple[Any, Any]:
    """A square matrix, and one whose last column repeats the first."""
    singular = torch.randn(batch, rows, columns)
    singular[:, :, -1] = singular[:, :, 0]
    return torch.randn(batch, columns, columns), singular


def test_eigenvalues_and_singular_values() -> None:
    dims = {0: AUTO, 1: AUTO, 2: AUTO}
    model = Factors()
    exe = rl.compile(rl.from_torch(model, matrices(2, 5, 4), dynamic_shapes=(dims, dims)))
    for sizes in ((2, 5, 4), (3, 17, 6), (2, 3, 8), (2, 3, 3)):
        args = matrices(*sizes)
        got, wanted = exe(*args), model(*args)
        for name, value in wanted.items():
            torch.testing.assert_close(got[name], value, rtol=1e-3, atol=1e-3, msg=lambda m, n=name: f"{n}: {m}")
