// Structs of the C ABI that may grow. Their first member, struct_size, is the caller's size.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "base/error.h"

namespace dlm {

// Sets up a program's struct of `size` bytes with the defaults. Bytes that this library does not
// know become 0; struct_size stays `size`, so that a use of the struct is then refused.
template <class Struct>
void give(const Struct& value, size_t size, Struct* to) {
  if (to == nullptr || size < sizeof to->struct_size) return;
  std::memset(static_cast<void*>(to), 0, size);
  std::memcpy(static_cast<void*>(to), &value, std::min(size, sizeof(Struct)));
  to->struct_size = size;
}

// A program's struct, with defaults for the fields that it lacks. Throws
// Error(DLM_INVALID_ARGUMENT) if it is larger than this library knows, or not set up.
template <class Struct>
Struct take(const Struct& given, Struct defaults, const char* name) {
  const size_t size = given.struct_size;
  if (size > sizeof(Struct) && size % alignof(Struct) == 0 && size < 16 * sizeof(Struct))
    fail(DLM_INVALID_ARGUMENT,
         "%s: struct_size is %zu, and this library (%s) knows %zu bytes of it: the program was "
         "compiled with the dlm_runtime.h of a newer library. Install that one, or compile with "
         "this one's header",
         name, size, dlm_version(), sizeof(Struct));
  if (size <= sizeof given.struct_size || size > sizeof(Struct) || size % alignof(Struct) != 0)
    fail(DLM_INVALID_ARGUMENT, "%s: struct_size is %zu, expected %zu: start from %s_init", name,
         size, sizeof(Struct), name);
  std::memcpy(&defaults, &given, size);
  defaults.struct_size = sizeof(Struct);
  return defaults;
}

}  // namespace dlm
