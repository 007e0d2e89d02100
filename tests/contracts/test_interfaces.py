"""The interface that gloo is told is the one with the address at which Ray reaches the node."""

from __future__ import annotations

from actors.interfaces import interface_of


def test_an_address_is_found_at_its_interface_and_one_of_another_machine_nowhere() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.77") == "", "set aside for documentation: nobody has it"
    assert interface_of("2001:db8::77") == ""
