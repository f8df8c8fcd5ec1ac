"""Stand-in for the quota service of a broker without quotas."""

from __future__ import annotations


class NoQuotas:
    """What handlers ask of `QuotaService`, while there is no quota."""

    active: None = None

    def mutation_quota(self, user: str, client_id: str | None, *, is_strict: bool) -> None:
        del user, client_id, is_strict

    def record_mutations(self, quota: None) -> int:
        del quota
        return 0
