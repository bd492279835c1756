// The tests of the program native_tests. Each function is defined in the source file of its name,
// prints "N passed, N failed" as its last line, and returns the exit status of the program.
#pragma once

int constraint_test(int count, char** arguments);
int draw_test(int count, char** arguments);
int native_test(int count, char** arguments);
int runner_test(int count, char** arguments);
int text_test(int count, char** arguments);
int threads_test(int count, char** arguments);
