"""Local steps: workers that exchange what they have changed, now and then."""
