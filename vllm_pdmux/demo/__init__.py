# SPDX-License-Identifier: Apache-2.0
"""The demo: chats stream while a long document is prefilled, with stock vLLM and then with the plugin, in one process.

Data flows down this list: `document` (the prose), `workload` (prompts), `engine` (the two engines), `drive` (one run,
measured), `comparison` (the two runs side by side), `picture` (what a person sees).
"""


class DemoError(ValueError):
    """The demo cannot run as asked; the message is one line that says what to change."""
