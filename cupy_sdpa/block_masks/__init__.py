"""Block-sparse attention: which blocks of keys each block of queries attends to, and how calls use it."""
