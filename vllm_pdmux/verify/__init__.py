# SPDX-License-Identifier: Apache-2.0
"""Stock vLLM against the plugin on the user's own machine: are the tokens equal, and what do requests wait for?

Data flows down this list: `workload` (the requests, and when they arrive), `answers` (one engine's tokens),
`engine_process` (all that one engine is asked, in a process of its own), `processes` (the two of them, one after the
other), `judge` (whether the tokens are stock's, and by which rule), `report` (what people, programs and a bug report
are told); `machine` is what the report says of the machine.
"""


class VerifyError(ValueError):
    """It cannot be verified as asked; the message is one line that says what to change."""
