"""Stand-in for ir/analyzer.py until it exists; deleted then."""

from relaxlite.ir.symbolic import SymVar, sym


class Analyzer:
    def _low(self, e):
        total = e.const
        for m, c in e.terms:
            lo, hi = 1, 1
            for a in m:
                if not isinstance(a, SymVar) or a.lower is None or a.lower < 0:
                    return None
                lo *= a.lower
                hi = None if hi is None or a.upper is None else hi * a.upper
            if c < 0 and hi is None:
                return None
            total += c * (lo if c > 0 else hi)
        return total

    def can_prove_equal(self, a, b):
        return sym(a) is sym(b)

    def can_prove_le(self, a, b):
        low = self._low(sym(b) - a)
        return low is not None and low >= 0

    def can_prove_lt(self, a, b):
        return self.can_prove_le(sym(a) + 1, b)

    def can_prove_ne(self, a, b):
        return self.can_prove_lt(a, b) or self.can_prove_lt(b, a)
