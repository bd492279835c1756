// Compact tables of Unicode sets by name, and of simple case folding. unicode.cc reads them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dlm::compile {

// The encoding of the tables. A number is stored with seven bits per byte, lowest bits first. In
// all bytes of a number except the last one, the highest bit is set. A list of ascending numbers is
// stored as its length, followed by the differences between neighbours. The first difference is the
// first number itself.

// The sets of code points. A boundary is a code point at which a set begins or ends. A set is
// stored as its difference from earlier sets: the number of earlier sets used, the indices of these
// sets, and a list of code points. To decode a set, join this list with the boundaries of all these
// earlier sets. The boundaries of the new set are the code points that appear an odd number of
// times.
extern const uint8_t kUnicodeSets[];
extern const size_t kUnicodeSetCount;

// Groups of characters that are equal if case is ignored. A group is stored as its lowest
// character, followed by a list of the remaining characters of the group. The lowest character is
// stored as the difference from the lowest character of the previous group. In the list, the first
// difference is from the lowest character of the group.
extern const uint8_t kCaseFolds[];
extern const size_t kCaseFoldCount;

struct UnicodeName {
  const char* name;  // for example "gc=lu", or "=alphabetic" for a property without values
  uint16_t set;
};
extern const UnicodeName kUnicodeNames[];  // sorted by name
extern const size_t kUnicodeNameCount;

struct UnicodeAlias {
  const char *name, *short_name;  // for example "script" and "sc"
};
extern const UnicodeAlias kUnicodeProperties[];
extern const size_t kUnicodePropertyCount;

}  // namespace dlm::compile
