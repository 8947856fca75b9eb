"""What reads programs besides running them: the description and the report of a call, and the modes for people who debug."""
