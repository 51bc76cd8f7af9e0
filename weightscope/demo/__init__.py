"""The whole chain on embedded data, with a report."""
