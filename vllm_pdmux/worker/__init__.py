# SPDX-License-Identifier: Apache-2.0
"""The worker side: a second runner whose forward pass is suspended at layer boundaries."""
