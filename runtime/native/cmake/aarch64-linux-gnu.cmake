# For 64-bit Arm under Linux, with Debian's and Ubuntu's cross compiler (apt-get install g++-aarch64-linux-gnu):
#
#   cmake -S runtime/native -B build/native-aarch64 -DCMAKE_TOOLCHAIN_FILE=cmake/aarch64-linux-gnu.cmake
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_FIND_ROOT_PATH /usr/aarch64-linux-gnu)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
# Headers of engines, of which CMakeLists.txt checks our declarations, are the same for every processor.
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE BOTH)
