"""The sections of the page: each makes its part of what the run holds, or nothing."""
