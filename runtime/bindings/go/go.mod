module example.com/dlm

go 1.19
