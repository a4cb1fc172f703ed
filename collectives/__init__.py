"""The ground: runtime, communication, boxes, randomness, algorithms. What every strategy stands on."""
