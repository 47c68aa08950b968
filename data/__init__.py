"""Text and tables: readers, prompts, start states, rewards, grading, task suites. Imports neither torch nor prefect."""
