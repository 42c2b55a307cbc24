"""The client side of tokenmq: reads input, submits, collects. Imports broker's contract only."""
