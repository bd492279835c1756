#include "text/normalisation.h"

#include <algorithm>
#include <array>
#include <vector>

#include "base/utf8.h"

namespace dlm {
namespace {

// In the table TextFile::nfc, this number marks the starters that composition may change. A starter
// is a character whose combining class is 0.
constexpr uint8_t kStarts = 255;
// A text whose code points are all below this limit is already composed.
constexpr char32_t kFirstChange = 0x300;
// Constants for composing and decomposing Hangul syllables by arithmetic (section 3.12 of the
// Unicode standard).
constexpr char32_t kSyllables = 0xAC00, kLeads = 0x1100, kVowels = 0x1161, kTails = 0x11A7;
constexpr char32_t kLeadCount = 19, kVowelCount = 21, kTailCount = 28,
                   kSyllableCount = kLeadCount * kVowelCount * kTailCount;

struct Point {
  char32_t point;
  uint8_t order;  // combining class of the character
};

uint8_t order_of(const TextFile& file, char32_t point) {
  const uint8_t found = file.nfc[point];
  return found == kStarts ? 0 : found;
}

void decompose(const TextFile& file, char32_t point, std::vector<Point>& out) {
  if (point - kSyllables < kSyllableCount) {
    const char32_t at = point - kSyllables, tail = at % kTailCount;
    out.push_back({kLeads + at / (kVowelCount * kTailCount), 0});
    out.push_back({kVowels + at / kTailCount % kVowelCount, 0});
    if (tail > 0) out.push_back({kTails + tail, 0});
    return;
  }
  const auto wanted = static_cast<int32_t>(point);
  const int32_t* const found =
      std::lower_bound(file.decomposed.begin(), file.decomposed.end(), wanted);
  if (found == file.decomposed.end() || *found != wanted)
    return out.push_back({point, order_of(file, point)});
  const int32_t* const starts = file.decomposition_starts.data + (found - file.decomposed.begin());
  for (int32_t i = starts[0]; i < starts[1]; ++i) {
    const auto part = static_cast<char32_t>(file.decomposition_points[i]);
    out.push_back({part, order_of(file, part)});
  }
}

// Returns the character that replaces two characters when they are composed. Returns 0 if the two
// characters cannot be composed.
char32_t composed(const TextFile& file, char32_t first, char32_t second) {
  if (first - kLeads < kLeadCount && second - kVowels < kVowelCount)
    return kSyllables + ((first - kLeads) * kVowelCount + (second - kVowels)) * kTailCount;
  if (first - kSyllables < kSyllableCount && (first - kSyllables) % kTailCount == 0 &&
      second > kTails && second - kTails < kTailCount)
    return first + (second - kTails);
  using Entry = std::array<int32_t, 3>;
  const auto* const begin = reinterpret_cast<const Entry*>(file.compositions.data);
  const auto* const end = begin + file.compositions.size / 3;
  const Entry wanted{static_cast<int32_t>(first), static_cast<int32_t>(second), 0};
  const auto* const found = std::lower_bound(begin, end, wanted);
  return found != end && (*found)[0] == wanted[0] && (*found)[1] == wanted[1]
             ? static_cast<char32_t>((*found)[2])
             : 0;
}

// Sorts each run of combining marks by combining class.
void sort_marks(std::vector<Point>& points) {
  const auto is_start = [](const Point& each) { return each.order == 0; };
  for (auto first = points.begin(); first != points.end();) {
    first = std::find_if_not(first, points.end(), is_start);
    const auto last = std::find_if(first, points.end(), is_start);
    std::stable_sort(first, last, [](const Point& a, const Point& b) { return a.order < b.order; });
    first = last;
  }
}

// Composes each character with the last starter before it, if the table contains a composition of
// the two. If marks remain between the two, the combining class of the last mark must be lower than
// the class of the character.
void join(const TextFile& file, std::vector<Point>& points) {
  // `start` is the index of the last starter. Until the first starter is found, `start` is
  // points.size(), which is not a valid index.
  size_t kept = 0, start = points.size();
  for (size_t i = 0; i < points.size(); ++i) {
    const Point point = points[i];
    const bool is_open = start + 1 == kept || (start < kept && points[kept - 1].order != 0 &&
                                               points[kept - 1].order < point.order);
    const char32_t whole = is_open ? composed(file, points[start].point, point.point) : 0;
    if (whole != 0) {
      points[start].point = whole;
      continue;
    }
    if (point.order == 0) start = kept;
    points[kept++] = point;
  }
  points.resize(kept);
}

}  // namespace

void rewrite(const TextFile& file, std::string_view text, std::string& out) {
  std::vector<Point> points;
  points.reserve(text.size());
  size_t run = 0;  // index of the first mark after the last starter
  const auto put = [&](char32_t point) {
    const uint8_t found = file.nfc[point];
    const uint8_t order = found > TextFile::marks ? found - TextFile::marks : 0;
    size_t at = points.size();
    while (order != 0 && at > run && points[at - 1].order > order) --at;
    points.insert(points.begin() + static_cast<std::ptrdiff_t>(at), {point, order});
    if (order == 0) run = points.size();
  };
  for (size_t at = 0; at < text.size();) {
    const char32_t point = next_char(text, at);
    switch (file.nfc[point]) {
      case TextFile::dropped:
        break;
      case TextFile::breaks:
        run = points.size();
        break;
      case TextFile::padded:
        for (const char32_t each : {U' ', point, U' '}) points.push_back({each, 0});
        run = points.size();
        break;
      case TextFile::replaced: {
        const auto* const found = std::lower_bound(file.decomposed.begin(), file.decomposed.end(),
                                                   static_cast<int32_t>(point));
        if (found == file.decomposed.end() || *found != static_cast<int32_t>(point)) break;
        const int32_t* const starts =
            file.decomposition_starts.data + (found - file.decomposed.begin());
        for (int32_t i = starts[0]; i < starts[1]; ++i)
          put(static_cast<char32_t>(file.decomposition_points[i]));
        break;
      }
      default:
        put(point);
    }
  }
  out.clear();
  for (const Point& each : points) append_char(each.point, out);
}

bool compose(const TextFile& file, std::string_view text, std::string& out) {
  bool is_composed = true;
  for (size_t at = 0; is_composed && at < text.size();)
    if (const char32_t point = next_char(text, at); point >= kFirstChange)
      is_composed = file.nfc[point] == 0;
  if (is_composed) return false;
  std::vector<Point> points;
  points.reserve(text.size());
  for (size_t at = 0; at < text.size();) decompose(file, next_char(text, at), points);
  sort_marks(points);
  join(file, points);
  out.clear();
  for (const Point& each : points) append_char(each.point, out);
  return true;
}

}  // namespace dlm
