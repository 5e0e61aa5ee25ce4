"""The students' edition and the instructor's copy."""
