"""Events to tables and figures."""
