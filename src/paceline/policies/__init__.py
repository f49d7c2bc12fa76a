"""Pure decisions: numbers in, decision + reason + state out. No torch, no clock, no environment."""
