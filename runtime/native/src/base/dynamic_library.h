// Loads third-party libraries at run time, when an engine needs them. The runtime does not link to
// these libraries.
#pragma once

#include <string>
#include <vector>

namespace dlm {

struct LibrarySearch {
  const char* what;      // name for messages: "ONNX Runtime"
  const char* variable;  // if the caller gives no path, this environment variable contains the
                         // path; no path
  std::vector<std::string> names;  // file names to try, in order
  const char* advice;              // what the user can do if the library is missing
};

// Opens a library and returns its handle. If `given` is a path, opens that path. Otherwise opens
// the path in the environment variable. If the variable is empty, tries the file names in order
// until one can be loaded. Sets *name to the path or file name that was opened. The library is
// never closed, because third-party libraries may run threads of their own. Throws
// Error(DLM_ENGINE_MISSING).
void* open_library(const LibrarySearch& search, const std::string& given, std::string* name);

}  // namespace dlm
