"""One model on several devices: a process each, started by torchrun."""
