#include "compile/regex/unicode.h"

#include <algorithm>
#include <cassert>
#include <cstring>

#include "compile/regex/unicode_tables.h"

namespace dlm::compile {
namespace {

uint32_t read_number(const uint8_t*& at) {
  uint32_t number = 0;
  for (int shift = 0;; shift += 7) {
    const uint32_t byte = *at++;
    number |= (byte & 0x7F) << shift;
    if (byte < 0x80) return number;
  }
}

// Returns a pointer to the start of each set in kUnicodeSets.
const std::vector<const uint8_t*>& set_starts() {
  static const auto starts = [] {
    std::vector<const uint8_t*> made;
    const uint8_t* at = kUnicodeSets;
    for (size_t set = 0; set < kUnicodeSetCount; ++set) {
      made.push_back(at);
      for (uint32_t bases = read_number(at); bases > 0; --bases) read_number(at);
      for (uint32_t edges = read_number(at); edges > 0; --edges) read_number(at);
    }
    return made;
  }();
  return starts;
}

// Returns the boundaries of a set. A boundary at an even index is the first code point of a range.
// A boundary at an odd index is the first code point after a range.
std::vector<uint32_t> set_edges(size_t set) {
  const uint8_t* at = set_starts()[set];
  std::vector<std::vector<uint32_t>> lists(1);
  for (uint32_t bases = read_number(at); bases > 0; --bases)
    lists.push_back(set_edges(read_number(at)));
  uint32_t edge = 0;
  for (uint32_t edges = read_number(at); edges > 0; --edges)
    lists[0].push_back(edge += read_number(at));
  std::vector<uint32_t> made = lists[0];
  for (size_t list = 1; list < lists.size(); ++list) {
    std::vector<uint32_t> merged;
    std::set_symmetric_difference(made.begin(), made.end(), lists[list].begin(), lists[list].end(),
                                  std::back_inserter(merged));
    made = std::move(merged);
  }
  return made;
}

CodePoints unicode_set(size_t set) {
  const std::vector<uint32_t> edges = set_edges(set);
  assert(edges.size() % 2 == 0);
  CodePoints points;
  for (size_t i = 0; i < edges.size(); i += 2) points.push_back({edges[i], edges[i + 1] - 1});
  return points;
}

std::optional<CodePoints> by_key(const std::string& key) {
  const UnicodeName* const end = kUnicodeNames + kUnicodeNameCount;
  const UnicodeName* const found = std::lower_bound(
      kUnicodeNames, end, key,
      [](const UnicodeName& name, const std::string& wanted) { return name.name < wanted; });
  if (found == end || found->name != key) return std::nullopt;
  return unicode_set(found->set);
}

// Normalises the name of a property as the Rust crate regex-syntax does. For example, removes "is"
// from the start of a name. The name "isc" stays unchanged, because it is a name of the property
// ISO_Comment. Without "is", it would be "c", the name of the category C.
std::string plain_name(std::string_view name) {
  const bool has_is =
      name.size() >= 2 && (name[0] == 'i' || name[0] == 'I') && (name[1] == 's' || name[1] == 'S');
  std::string plain;
  for (const char letter : name.substr(has_is ? 2 : 0)) {
    if (letter == ' ' || letter == '_' || letter == '-' || static_cast<uint8_t>(letter) >= 0x80)
      continue;
    plain += letter >= 'A' && letter <= 'Z' ? static_cast<char>(letter + 32) : letter;
  }
  return has_is && plain == "c" ? "isc" : plain;
}

std::optional<CodePoints> general_category(const std::string& name) {
  const CodePoints all = complement({});
  if (name == "any") return all;
  if (name == "ascii") return CodePoints{{0, 0x7F}};
  if (name == "assigned") return complement(*by_key("gc=unassigned"));
  return by_key("gc=" + name);
}

// Returns all characters of the Unicode version `value`. They include the characters of earlier
// versions.
std::optional<CodePoints> age(const std::string& value) {
  // Returns 603 for "6.3", and 0 for other spellings.
  const auto version = [](std::string_view key) {
    unsigned major = 0, minor = 0;
    return std::sscanf(std::string(key).c_str(), "%2u.%1u", &major, &minor) == 2
               ? 100 * major + minor
               : 0U;
  };
  const UnicodeName* const end = kUnicodeNames + kUnicodeNameCount;
  const auto named = [&](const std::string& key) {
    return std::find_if(kUnicodeNames, end,
                        [&](const UnicodeName& each) { return each.name == key; });
  };
  const UnicodeName* const wanted = named("age=" + value);
  if (wanted == end) return std::nullopt;
  unsigned last = 0;
  for (const UnicodeName* each = kUnicodeNames; each < end; ++each)
    if (std::strncmp(each->name, "age=", 4) == 0 && each->set == wanted->set)
      last = std::max(last, version(each->name + 4));
  CodePoints points;
  for (const UnicodeName* each = kUnicodeNames; each < end; ++each)
    if (std::strncmp(each->name, "age=", 4) == 0 && version(each->name + 4) > 0 &&
        version(each->name + 4) <= last)
      points = joined(points, unicode_set(each->set));
  return points;
}

// Returns groups of characters that are equal if case is ignored, such as K, k and the Kelvin sign.
// The characters of each group are in ascending order.
const std::vector<std::vector<char32_t>>& case_folds() {
  static const auto folds = [] {
    std::vector<std::vector<char32_t>> made;
    const uint8_t* at = kCaseFolds;
    char32_t low = 0;
    for (size_t group = 0; group < kCaseFoldCount; ++group) {
      low += read_number(at);
      std::vector<char32_t> points{low};
      char32_t point = low;
      for (uint32_t others = read_number(at); others > 0; --others)
        points.push_back(point += read_number(at));
      made.push_back(std::move(points));
    }
    return made;
  }();
  return folds;
}

}  // namespace

CodePoints intersection(const CodePoints& first, const CodePoints& second) {
  CodePoints both;
  for (auto a = first.begin(), b = second.begin(); a != first.end() && b != second.end();) {
    const char32_t low = std::max(a->low, b->low), high = std::min(a->high, b->high);
    if (low <= high) both.push_back({low, high});
    a->high < b->high ? ++a : ++b;
  }
  return both;
}

CodePoints joined(const CodePoints& first, const CodePoints& second) {
  CodePoints all = first;
  all.insert(all.end(), second.begin(), second.end());
  return normalised(std::move(all));
}

bool contains(const CodePoints& points, char32_t point) {
  const auto after = std::upper_bound(
      points.begin(), points.end(), point,
      [](char32_t value, const CodePointRange& range) { return value < range.low; });
  return after != points.begin() && point <= (after - 1)->high;
}

std::optional<CodePoints> unicode_property(std::string_view name,
                                           std::optional<std::string_view> value) {
  const std::string plain = plain_name(name);
  if (!value) {
    if (auto found = by_key("=" + plain)) return found;
    if (auto found = general_category(plain)) return found;
    return by_key("sc=" + plain);
  }
  const UnicodeAlias* const end = kUnicodeProperties + kUnicodePropertyCount;
  const UnicodeAlias* const found = std::find_if(
      kUnicodeProperties, end, [&](const UnicodeAlias& alias) { return alias.name == plain; });
  if (found == end) return std::nullopt;
  const std::string property = found->short_name, wanted = plain_name(*value);
  if (property == "gc") return general_category(wanted);
  if (property == "age") return age(wanted);
  return by_key(property + "=" + wanted);
}

const CodePoints& unicode_word() {
  static const CodePoints points = *by_key("perl_word");
  return points;
}

const CodePoints& unicode_digits() {
  static const CodePoints points = *by_key("gc=nd");
  return points;
}

const CodePoints& unicode_spaces() {
  static const CodePoints points = *by_key("=whitespace");
  return points;
}

CodePoints with_all_cases(const CodePoints& points) {
  if (points.empty()) return points;
  CodePoints all = points;
  for (const std::vector<char32_t>& group : case_folds()) {
    if (group.front() > points.back().high) break;
    if (group.back() < points.front().low) continue;
    if (std::any_of(group.begin(), group.end(),
                    [&](char32_t point) { return contains(points, point); }))
      for (const char32_t point : group) all.push_back({point, point});
  }
  return normalised(std::move(all));
}

}  // namespace dlm::compile
