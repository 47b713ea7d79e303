// Small ints of Python, of one digit: less than 2^30 either side of 0. They are read without a call.
#pragma once

#include "bindings/bindings.h"

#if PY_VERSION_HEX < 0x030B0000
#include <longintrepr.h>
#endif

namespace kvpage {

// Requires an exact int.
inline bool is_small(PyObject* number) {
#if PY_VERSION_HEX >= 0x030C0000
  return PyUnstable_Long_IsCompact(reinterpret_cast<PyLongObject*>(number));
#else
  const Py_ssize_t signed_digits = reinterpret_cast<PyVarObject*>(number)->ob_size;
  return signed_digits >= -1 && signed_digits <= 1;
#endif
}

// Requires that it is small.
inline int64_t small_value(PyObject* number) {
#if PY_VERSION_HEX >= 0x030C0000
  return PyUnstable_Long_CompactValue(reinterpret_cast<PyLongObject*>(number));
#else
  const auto* whole = reinterpret_cast<PyLongObject*>(number);
  return reinterpret_cast<PyVarObject*>(number)->ob_size * static_cast<int64_t>(whole->ob_digit[0]);
#endif
}

}  // namespace kvpage
