"""Plain data that passes between the layers: requests, steps, results, events. No torch."""
