"""What all tests share."""

import signal

# A shell that starts a job in the background has it ignore SIGINT; the tests of Ctrl-C need what a terminal gives.
signal.signal(signal.SIGINT, signal.default_int_handler)
