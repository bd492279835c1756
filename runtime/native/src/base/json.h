// A strict JSON parser (RFC 8259) for text that may be damaged or hostile.
//
// It also rejects byte order marks, invalid UTF-8, unpaired surrogates, numbers that overflow a
// double, and duplicate keys. It rejects an escaped NUL, because strings become C strings. It also
// rejects text that is longer or more deeply nested than the caller allows.
//
// Every failure throws Error(DLM_BAD_BUNDLE). The message of a syntax error starts with "line N: ".
// If a value has the wrong type or range, the message starts with the path of the value, for
// example `denoiser.layers: expected an integer in 1..65536, found "x"`. Messages quote the text
// with escapes, and cut it to 60 characters.
//
// A parsed value takes about 120 bytes of memory. So parsing n bytes of text may take 100 n bytes
// of memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace dlm::json {

constexpr int kMaxDepth = 64;

// Quotes `text` for a message: in double quotes, with non-ASCII and control characters escaped, and
// cut to 60 characters.
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

  // key() is the key if this value is a member of an object, and otherwise "". line() is the number
  // of the line where the value starts. The first line is 1.
  const std::string& key() const { return key_; }
  int32_t line() const { return line_; }

  // The path of this value, as messages show it, such as presets[0].block_length.
  std::string path() const;
  // Throws an error with the message "<path>: <reason>". Callers use it to report a value that they
  // cannot accept.
  [[noreturn]] void refuse(const std::string& reason) const;

  // Each of these functions returns the value as the type that its name says. It throws if the
  // value has another type.
  bool boolean() const;
  double number(double low, double high) const;  // throws unless low <= number <= high
  // Throws unless low <= integer <= high. A number with a fraction or exponent is an error too.
  int64_t integer(int64_t low, int64_t high) const;
  const std::string& string() const;
  const std::string& written() const { return text_; }  // text of a number, as written in the file
  const std::vector<Value>& elements() const;           // of an array
  // The members of an object, in file order. Each member knows its key().
  const std::vector<Value>& members() const;

  // Find the member of an object that has this key. If the key is missing, find returns nullptr.
  // The other functions throw an error.
  const Value* find(std::string_view key) const;
  const Value& at(std::string_view key) const;
  bool boolean(std::string_view key) const { return at(key).boolean(); }
  int64_t integer(std::string_view key, int64_t low, int64_t high) const {
    return at(key).integer(low, high);
  }
  const std::string& string(std::string_view key) const { return at(key).string(); }
  const std::vector<Value>& array(std::string_view key) const { return at(key).elements(); }
  const Value& object(std::string_view key) const;

  // Returns the value as canonical text: keys are sorted, there is no white space, and integers are
  // decimal. The top-level member `without` is left out. The text equals Python's json.dumps(value,
  // sort_keys=True, separators=(",", ":")). Throws an error for fractions, and for strings that are
  // not printable ASCII.
  std::string canonical(std::string_view without = {}) const;

  // Throws an error for the first member whose key is not in `known`. Unknown keys must not be
  // ignored, because they could change the meaning of the file.
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
  // The value that contains this one. It is set when the tree is complete and no longer moves. The
  // root owns the tree.
  const Value* parent_ = nullptr;
  std::string key_;
  std::string text_;  // the text of a string, or of a number as written
  std::vector<Value> items_;
};

// Parses text that consists of exactly one value. max_bytes limits the length of the text, and
// max_depth the nesting.
std::unique_ptr<const Value> parse(std::string_view text, size_t max_bytes,
                                   int max_depth = kMaxDepth);

}  // namespace dlm::json
