// A strict JSON parser (RFC 8259) for text that may be damaged or hostile.
//
// The parser rejects byte order marks, invalid UTF-8, unpaired surrogates, numbers that overflow a
// double, and duplicate keys. It also rejects an escaped NUL, because the library converts strings
// to C strings. The caller passes limits for the length and the nesting depth of the text, and the
// parser rejects text that exceeds these limits.
//
// Every failure throws an Error with status DLM_BAD_BUNDLE. The message of a syntax error starts
// with "line N: ". If a value has the wrong type or range, the message starts with the path of the
// value, for example `denoiser.layers: expected an integer in 1..65536, found "x"`. Messages quote
// at most 60 characters of the text, with escapes.
//
// Each parsed value takes about 120 bytes of memory, and the text of a value may have one byte. So
// parsing n bytes of text may take 100 * n bytes of memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace dlm::json {

constexpr int kMaxDepth = 64;

// Returns `text` in double quotes, for use in a message. Escapes non-ASCII and control characters,
// and cuts the text to 60 characters.
std::string quoted(std::string_view text);

class Value {
 public:
  enum class Kind : uint8_t { null, boolean, number, string, array, object };

  Value() = default;
  Value(Value&&) = default;
  Value& operator=(Value&&) = default;
  Value(const Value&) = delete;
  Value& operator=(const Value&) = delete;

  Kind kind() const { return kind_; }

  // Returns the key if this value is a member of an object, and "" otherwise.
  const std::string& key() const { return key_; }

  // Returns the path of this value in the form that messages use, such as presets[0].block_length.
  std::string path() const;
  // Throws an error with the message "<path>: <reason>". Callers use this function to reject a
  // value.
  [[noreturn]] void refuse(const std::string& reason) const;

  // Each of the next functions returns the value as the type in the function's name. If the value
  // has a different type, the function throws an error.
  bool boolean() const;
  double number(double low, double high) const;  // throws an error unless low <= number <= high
  // Throws an error unless low <= integer <= high. Also throws an error if the number is written
  // with a fraction or an exponent.
  int64_t integer(int64_t low, int64_t high) const;
  const std::string& string() const;
  // Returns the text of a number as it is written in the file.
  const std::string& written() const { return text_; }
  const std::vector<Value>& elements() const;  // returns the elements of an array
  // Returns the members of an object, in file order. Each member's key() is the member's key.
  const std::vector<Value>& members() const;

  // Each of the next functions finds the member with the given key in an object. If the key is
  // missing, find() returns nullptr, and the other functions throw an error.
  const Value* find(std::string_view key) const;
  const Value& at(std::string_view key) const;
  bool boolean(std::string_view key) const { return at(key).boolean(); }
  int64_t integer(std::string_view key, int64_t low, int64_t high) const {
    return at(key).integer(low, high);
  }
  const std::string& string(std::string_view key) const { return at(key).string(); }
  const std::vector<Value>& array(std::string_view key) const { return at(key).elements(); }
  const Value& object(std::string_view key) const;

  // Returns the value as canonical text, without the top-level member named `without`. In canonical
  // text, keys are sorted, there is no white space, and integers are decimal. The text equals
  // Python's json.dumps(value, sort_keys=True, separators=(",", ":")). Throws an error for
  // fractions, and for strings that are not printable ASCII.
  std::string canonical(std::string_view without = {}) const;

  // Throws an error for the first member whose key is not in `known`. An unknown key could change
  // the meaning of the file, so the caller must not ignore it.
  void refuse_unknown(const std::vector<std::string_view>& known) const;

 private:
  friend class Reader;
  void append_canonical(std::string& out, std::string_view without) const;
  std::string found() const;
  [[noreturn]] void expected(const std::string& what) const;

  Kind kind_ = Kind::null;
  bool truth_ = false;
  bool is_integer_ = false;
  int32_t line_ = 0;
  int64_t integer_ = 0;
  double number_ = 0;
  // The value that contains this value. The parser sets this pointer at the end, when values no
  // longer move in memory. The root value owns all other values.
  const Value* parent_ = nullptr;
  std::string key_;
  std::string text_;  // the content of a string, or a number as written in the file
  std::vector<Value> items_;
};

// Parses text that consists of exactly one value. max_bytes is the largest length of the text, and
// max_depth is the largest nesting depth.
std::unique_ptr<const Value> parse(std::string_view text, size_t max_bytes,
                                   int max_depth = kMaxDepth);

}  // namespace dlm::json
