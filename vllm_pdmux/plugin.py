# SPDX-License-Identifier: Apache-2.0
"""The entry point that vLLM calls in every process; everything it does is in `activation`."""


def register() -> None:
    """Entry point of the group ``vllm.general_plugins``: make the platform ask us after it has checked a config."""
    from vllm_pdmux.activation import install

    install()
