// Foreign libraries, opened when an engine is wanted and never linked.
#pragma once

#include <string>
#include <vector>

namespace dlm {

struct LibrarySearch {
  const char* what;                // for messages: "ONNX Runtime"
  const char* variable;            // of the environment, a path; comes after `given`
  std::vector<std::string> names;  // of the system, in order
  const char* advice;              // what to do where it is missing
};

// Opens `given`, else the variable's path, else the first of the names that loads; *name is what
// was opened. It is never closed: such libraries have threads. Throws Error(DLM_ENGINE_MISSING).
void* open_library(const LibrarySearch& search, const std::string& given, std::string* name);

}  // namespace dlm
