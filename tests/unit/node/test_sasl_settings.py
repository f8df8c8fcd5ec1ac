"""Settings of a broker about authentication."""

from __future__ import annotations

import pytest

from mansio.config.settings import Settings
from mansio.errors import ConfigError
from mansio.host.clock import HostRandom
from mansio.node.sasl_settings import sasl_settings
from mansio.state.authentication.sasl_session import MECHANISMS


def test_all_mechanisms_are_offered_by_default_and_sessions_have_no_end() -> None:
    made = sasl_settings(Settings(), "EXTERNAL", HostRandom())
    assert (made.mechanisms, made.listener, made.session_ms_max) == (MECHANISMS, "EXTERNAL", 0)
    assert (made.failure_delay_ms, made.frame_bytes_max) == (100, 524_288)


def test_mechanisms_are_a_list_in_the_order_of_the_setting() -> None:
    settings = Settings(sasl_enabled_mechanisms=" PLAIN, SCRAM-SHA-512,PLAIN")
    assert sasl_settings(settings, "A", HostRandom()).mechanisms == ("PLAIN", "SCRAM-SHA-512")


@pytest.mark.parametrize("text", ["", "GSSAPI", "PLAIN,,SCRAM-SHA-256", "plain", "OAUTHBEARER"])
def test_another_mechanism_is_refused_with_those_that_there_are(text: str) -> None:
    with pytest.raises(ConfigError, match=r"sasl_enabled_mechanisms: .*SCRAM-SHA-512"):
        sasl_settings(Settings(sasl_enabled_mechanisms=text), "A", HostRandom())
