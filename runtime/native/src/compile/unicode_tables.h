// Compact tables of Unicode sets by name, and of simple case folding. unicode.cc reads them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dlm::compile {

// A number is stored with seven bits per byte, lowest bits first. All bytes but the last have the
// highest bit set. A list of ascending numbers is stored as its count, followed by the differences
// between neighbours; the first difference is from 0.

// A set is stored as the number of earlier sets that it uses, their indices, and a list of code
// points. The set begins or ends at each code point that appears an odd number of times in total:
// in this list, and where the earlier sets begin or end.
extern const uint8_t kUnicodeSets[];
extern const size_t kUnicodeSetCount;

// Groups of characters that are equal if case is ignored. A group is stored as the difference of
// its lowest character from the lowest of the previous group, followed by a list of its other
// characters. The first difference in that list is from the group's lowest character.
extern const uint8_t kCaseFolds[];
extern const size_t kCaseFoldCount;

struct UnicodeName {
  const char* name;  // such as "gc=lu", or "=alphabetic" for a property without values
  uint16_t set;
};
extern const UnicodeName kUnicodeNames[];  // ascending
extern const size_t kUnicodeNameCount;

struct UnicodeAlias {
  const char *name, *short_name;  // such as "script" and "sc"
};
extern const UnicodeAlias kUnicodeProperties[];
extern const size_t kUnicodePropertyCount;

}  // namespace dlm::compile
