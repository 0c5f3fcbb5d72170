//! The page: three files that need nothing else.

use axum::http::header::{CONTENT_TYPE, HeaderName};

type File = ([(HeaderName, &'static str); 1], &'static str);

pub(crate) async fn html() -> File {
    ([(CONTENT_TYPE, "text/html; charset=utf-8")], include_str!("page/page.html"))
}

pub(crate) async fn script() -> File {
    ([(CONTENT_TYPE, "text/javascript; charset=utf-8")], include_str!("page/page.js"))
}

pub(crate) async fn style() -> File {
    ([(CONTENT_TYPE, "text/css; charset=utf-8")], include_str!("page/page.css"))
}
