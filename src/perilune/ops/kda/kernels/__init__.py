"""KDA in Triton and Gluon: what each kernel does stands in its file, how they follow one another in `launch`."""
