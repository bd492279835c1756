// Sets of Unicode by name, and simple case folding, in few bytes. unicode.h reads them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dlm::compile {

// Numbers have seven bits a byte, the lowest first; all bytes but the last have the eighth bit.
// A list of ascending numbers is its count, and then the differences, the first from 0.

// Each set: how many earlier sets, their places, and a list of code points. Where each of these
// lists and those of the earlier sets, together, has a point an odd number of times, the set begins
// or ends.
extern const uint8_t kUnicodeSets[];
extern const size_t kUnicodeSetCount;

// Characters that are equal when case is ignored: the difference of the lowest one from the lowest
// of the group before, and a list of the others' differences from it.
extern const uint8_t kCaseFolds[];
extern const size_t kCaseFoldCount;

struct UnicodeName {
  const char* name;  // "gc=lu"; "=alphabetic" for properties without values
  uint16_t set;
};
extern const UnicodeName kUnicodeNames[];  // ascending
extern const size_t kUnicodeNameCount;

struct UnicodeAlias {
  const char *name, *short_name;  // "script", "sc"
};
extern const UnicodeAlias kUnicodeProperties[];
extern const size_t kUnicodePropertyCount;

}  // namespace dlm::compile
