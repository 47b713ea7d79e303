// LinkedList: a doubly linked list through its elements themselves. It owns nothing and allocates nothing.
//
//      front                       back
//      | a | <-> | b | <-> | c |            an element is in at most one list a Link
#pragma once

namespace kvpage {

template <typename T>
struct Link {
  T* previous = nullptr;
  T* next = nullptr;
};

template <typename T, Link<T> T::* Member>
class LinkedList {
 public:
  T* front() const { return front_; }
  static T* next(const T* element) { return (element->*Member).next; }
  static T* previous(const T* element) { return (element->*Member).previous; }

  void push_front(T* element) noexcept { link(nullptr, element, front_); }
  void push_back(T* element) noexcept { link(back_, element, nullptr); }
  void insert_after(T* previous, T* element) noexcept { link(previous, element, next(previous)); }

  void remove(T* element) noexcept {
    Link<T>& own = element->*Member;
    (own.previous ? (own.previous->*Member).next : front_) = own.next;
    (own.next ? (own.next->*Member).previous : back_) = own.previous;
    own = {};
  }

 private:
  void link(T* previous, T* element, T* next) noexcept {
    element->*Member = {previous, next};
    (previous ? (previous->*Member).next : front_) = element;
    (next ? (next->*Member).previous : back_) = element;
  }

  T* front_ = nullptr;
  T* back_ = nullptr;
};

}  // namespace kvpage
