// Compact tables of named Unicode sets, and of simple case folding. unicode.cc decodes these
// tables.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dlm::compile {

// How numbers and lists are stored in the tables: a number is stored with seven bits per byte,
// lowest bits first. In each byte of a number except the last, the highest bit is set. A list of
// ascending numbers is stored as its length, followed by the differences between neighbours. The
// first difference is the first number itself.

// The sets of code points. A boundary of a set is the first code point of a range, or the first
// code point after a range. A set is stored as its difference from earlier sets. The entry consists
// of the number of these earlier sets, the indices of these sets, and a list of code points. To
// decode the set, join this list with the boundaries of these earlier sets. A code point is a
// boundary of the decoded set if it appears an odd number of times in the joined list.
extern const uint8_t kUnicodeSets[];
extern const size_t kUnicodeSetCount;

// Groups of characters that are equal if case is ignored. A group is stored as its lowest
// character, followed by a list of the remaining characters of the group. The lowest character is
// stored as the difference from the lowest character of the previous group. The first number of the
// list is the difference from the lowest character of the group.
extern const uint8_t kCaseFolds[];
extern const size_t kCaseFoldCount;

struct UnicodeName {
  // For example "gc=lu". The name of a property without values starts with =, as in "=alphabetic".
  const char* name;
  uint16_t set;
};
extern const UnicodeName kUnicodeNames[];  // the names are in ascending order
extern const size_t kUnicodeNameCount;

struct UnicodeAlias {
  const char *name, *short_name;  // for example "script" and "sc"
};
extern const UnicodeAlias kUnicodeProperties[];
extern const size_t kUnicodePropertyCount;

}  // namespace dlm::compile
