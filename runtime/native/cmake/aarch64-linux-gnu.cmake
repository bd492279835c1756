# Toolchain file to compile for 64-bit Arm Linux with the cross compiler of Debian or Ubuntu
# (apt-get install g++-aarch64-linux-gnu):
#
#   cmake -S runtime/native -B build/native-aarch64 -DCMAKE_TOOLCHAIN_FILE=cmake/aarch64-linux-gnu.cmake
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_FIND_ROOT_PATH /usr/aarch64-linux-gnu)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
# CMakeLists.txt compares our declarations with the headers of engines. These headers are the same
# for every processor, so those of the build machine may be used.
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE BOTH)
