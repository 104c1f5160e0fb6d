"""The engine: rounds in virtual time, exactly repeatable."""
