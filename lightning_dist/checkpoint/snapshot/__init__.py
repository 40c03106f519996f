"""What a save takes from a training, and when: copied at once, or while training goes on."""
