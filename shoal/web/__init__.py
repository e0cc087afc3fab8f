"""The live page of a job."""
