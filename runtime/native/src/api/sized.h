// Structs of callers that were compiled with another dlm_runtime.h than this library: their first
// member says where they end.
//
// A struct grows at its end alone. What an older caller's lacks has its default here, and nothing
// is ever written behind the end that the caller gave.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <string>

#include "base/error.h"

namespace dlm {

// What sizeof gives for a struct that ends with `bytes` of fields.
template <class Struct>
constexpr size_t size_of(size_t bytes) {
  return (bytes + alignof(Struct) - 1) / alignof(Struct) * alignof(Struct);
}
#define DLM_SIZE_UP_TO(type, field) dlm::size_of<type>(offsetof(type, field) + sizeof(type::field))

// A struct's name, and the sizes that headers since ABI version 3 gave it, oldest first.
template <class Struct>
struct Sized;

template <>
struct Sized<dlm_denoiser> {
  static constexpr char name[] = "dlm_denoiser";
  static constexpr std::array sizes = {DLM_SIZE_UP_TO(dlm_denoiser, eos_count),
                                       DLM_SIZE_UP_TO(dlm_denoiser, visible_block)};
};

template <>
struct Sized<dlm_open_options> {
  static constexpr char name[] = "dlm_open_options";
  static constexpr std::array sizes = {DLM_SIZE_UP_TO(dlm_open_options, check_hashes),
                                       DLM_SIZE_UP_TO(dlm_open_options, allow_fallback)};
};

template <>
struct Sized<dlm_generate_options> {
  static constexpr char name[] = "dlm_generate_options";
  static constexpr std::array sizes = {DLM_SIZE_UP_TO(dlm_generate_options, user),
                                       DLM_SIZE_UP_TO(dlm_generate_options, max_steps)};
};

// Throws Error(DLM_INVALID_ARGUMENT) for a size that no header gave.
template <class Struct>
void check_size(const Struct& given) {
  using Known = Sized<Struct>;
  static_assert(Known::sizes.back() == sizeof(Struct), "name the struct's last field in its sizes");
  const size_t size = given.struct_size;
  if (size > sizeof(Struct))
    fail(DLM_INVALID_ARGUMENT,
         "%s: struct_size is %zu, and this library (%s) knows %zu bytes of it: the program was "
         "compiled with the "
         "dlm_runtime.h of a newer library. Install that one, or compile with this one's header",
         Known::name, size, dlm_version(), sizeof(Struct));
  if (std::find(Known::sizes.begin(), Known::sizes.end(), size) == Known::sizes.end())
    fail(DLM_INVALID_ARGUMENT, "%s: struct_size is %zu, expected %zu: start from %s_init",
         Known::name, size, sizeof(Struct), Known::name);
}

// The caller's struct, of any known size, with the defaults of what it lacks. Throws as check_size
// does.
template <class Struct>
Struct take(const Struct& given, Struct defaults) {
  check_size(given);
  std::memcpy(&defaults, &given, given.struct_size);
  defaults.struct_size = sizeof(Struct);
  return defaults;
}

// Fills a caller's struct of `size` bytes, whatever that is; what this library does not know of it
// becomes 0.
template <class Struct>
void give(const Struct& value, size_t size, Struct* to) {
  if (to == nullptr || size < sizeof to->struct_size) return;
  std::memset(static_cast<void*>(to), 0, size);
  std::memcpy(static_cast<void*>(to), &value, std::min(size, sizeof(Struct)));
  to->struct_size = size;
}

}  // namespace dlm
