// Copies structs of the C ABI from and to callers. Later versions of the library may add fields to
// such a struct. The first member of the struct, struct_size, is the size of the struct in the
// version of the header with which the caller was compiled.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "base/error.h"

namespace dlm {

// Fills a caller's struct of `size` bytes with the defaults. If the caller's struct is larger than
// the library's version, the additional bytes become 0. struct_size becomes `size`, so that a later
// call can reject a struct that is too large. No struct has kMostGrowth times its size.
constexpr size_t kMostGrowth = 16;
template <class Struct>
void give(const Struct& value, size_t size, Struct* to) {
  if (to == nullptr || size < sizeof to->struct_size || size >= kMostGrowth * sizeof(Struct))
    return;
  std::memset(static_cast<void*>(to), 0, size);
  std::memcpy(static_cast<void*>(to), &value, std::min(size, sizeof(Struct)));
  to->struct_size = size;
}

// Copies a caller's struct. Fields that the caller's version of the struct lacks get their
// defaults. Throws an Error with status DLM_INVALID_ARGUMENT if the caller's struct was not
// initialised, or if the caller's struct is larger than the library's version of the struct.
template <class Struct>
Struct take(const Struct& given, Struct defaults, const char* name) {
  const size_t size = given.struct_size;
  if (size > sizeof(Struct) && size % alignof(Struct) == 0 && size < kMostGrowth * sizeof(Struct))
    fail(DLM_INVALID_ARGUMENT,
         "%s: struct_size is %zu, but this library (%s) supports %zu bytes: the program was "
         "compiled with the dlm_runtime.h of a newer library. Install the newer library, or "
         "compile with the header of this library",
         name, size, dlm_version(), sizeof(Struct));
  if (size <= sizeof given.struct_size || size > sizeof(Struct) || size % alignof(Struct) != 0)
    fail(DLM_INVALID_ARGUMENT, "%s: struct_size is %zu, expected %zu: start from %s_init", name,
         size, sizeof(Struct), name);
  std::memcpy(&defaults, &given, size);
  defaults.struct_size = sizeof(Struct);
  return defaults;
}

}  // namespace dlm
