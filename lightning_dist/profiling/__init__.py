"""Profile of communication: records of every rank, their analysis and reports."""
