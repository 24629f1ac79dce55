"""The harness: configuration, training core, rewards, sweep and tracking. It knows no arm by name."""

__version__ = "0.1.0"
