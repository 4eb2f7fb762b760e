"""Other programs that import the files of this one, and did not run."""


def judge(found, program, folders):
    pass
